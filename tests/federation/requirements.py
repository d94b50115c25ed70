"""What tests with real processes need of the machine."""

import shutil

import pytest

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin") is None,
    reason="nginx is not installed (apt-get install nginx-light)",
)
