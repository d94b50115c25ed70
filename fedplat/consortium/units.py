"""systemd units and Kubernetes manifests: how an administrator keeps a server or a site running.

A site is three processes under two users. The agent belongs to the kit's owner; link and SuperNode, which talk to the
network, to a user that can't read the site's data, keys and ledger. `fedplat site start` changes to them, so it starts
as a root that may do that and nothing else. A server needs no root at all.
"""

import json

AGENT_USER, NODE_USER, SERVER_USER = "fedplat", "fedplat-node", "fedplat-server"
IMAGE = "fedplat:latest"
SERVER_POD = ", runAsNonRoot: true, fsGroup: 10000, fsGroupChangePolicy: OnRootMismatch"
"""A change of group at every start would open the keys to it."""
SITE_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What it takes to open a kit that is closed to others, and to run its processes as their users."""
_HARDENED = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices={devices}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
CapabilityBoundingSet={capabilities}
SystemCallArchitectures=native
UMask=0077
Restart=always
RestartSec=2
"""
_COPY = (
    "umask 077; version() { sed -n 's/^ *\"version\": *\\([0-9]*\\).*/\\1/p' $1 2>/dev/null | head -n 1; }; "
    "for f in /secret/*; do n=$(basename $f); [ $n = site.toml ] && [ -e /kit/$n ] && continue; "
    '[ $n = roster.json ] && [ "$(version /kit/$n)" ] && [ $(version /kit/$n) -gt $(version $f) ] && continue; '
    "cp -L $f /kit/$n; done"
)
"""For a plain sh. A roster with a revocation must not be followed by the one before it."""
_QUIET = """\
Environment=FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
"""


def server_unit(consortium: str) -> str:
    kit = f"/etc/fedplat/{consortium}/server"
    return f"""\
# The server of consortium {consortium}: the kit belongs at {kit}, owned by {SERVER_USER}.
[Unit]
Description=fedplat server of {consortium}
After=network-online.target
Wants=network-online.target

[Service]
User={SERVER_USER}
ExecStart=/usr/bin/env fedplat server start {kit}
ReadWritePaths={kit}
{_QUIET}{_HARDENED.format(devices="yes", capabilities="")}
[Install]
WantedBy=multi-user.target
"""


def site_unit(consortium: str, name: str) -> str:
    kit = f"/etc/fedplat/{consortium}/{name}"
    capabilities = " ".join(f"CAP_{capability}" for capability in SITE_CAPABILITIES)
    return f"""\
# Site {name}: the kit belongs at {kit}, owned by {AGENT_USER}, with supernode_user = "{NODE_USER}" in federation.toml.
[Unit]
Description=fedplat site {name} of {consortium}
After=network-online.target
Wants=network-online.target

[Service]
# Starts the agent as the kit's owner, link and SuperNode as supernode_user. Both: useradd --system NAME
ExecStart=/usr/bin/env fedplat site start {kit}
# Add the ledger's directory if it is elsewhere. Data under /home needs ProtectHome=read-only.
ReadWritePaths={kit}
RuntimeDirectory=fedplat/{consortium}-{name}
RuntimeDirectoryMode=0711
LogsDirectory=fedplat/{consortium}-{name}
LogsDirectoryMode=0711
{_QUIET}{_HARDENED.format(devices="no", capabilities=capabilities)}
[Install]
WantedBy=multi-user.target
"""


def server_manifest(consortium: str, port: int) -> str:
    app = _resource(consortium, "server")
    return f"""\
# The server of consortium {consortium}. First: kubectl create secret generic {app}-kit --from-file=KIT_DIRECTORY
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {app}-state}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 20Gi}}}}
---
{_deployment(app, SERVER_POD)}
      initContainers:
        - {_container("copy-kit", 10001)}
{_copy_kit()}
      containers:
        - {_container("server", 10001)}
          command: [fedplat, server, start, /kit]
          ports: [{{containerPort: {port}}}]
          volumeMounts: [{{name: kit, mountPath: /kit}}, {{name: temporary, mountPath: /tmp}}]
      volumes:
        - {{name: secret, secret: {{secretName: {app}-kit}}}}
        - {{name: kit, persistentVolumeClaim: {{claimName: {app}-state}}}}
        - {{name: temporary, emptyDir: {{}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: {app}}}
spec:
  type: LoadBalancer
  selector: {{app: {app}}}
  ports: [{{port: {port}, targetPort: {port}}}]
"""


def site_manifest(consortium: str, name: str) -> str:
    app = _resource(consortium, name)
    return f"""\
# Site {name}; set supernode_user = "{NODE_USER}" in federation.toml, with both users in the image. First: kubectl \
create secret generic {app}-kit --from-file=KIT_DIRECTORY
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {app}-state}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 5Gi}}}}
---
{_deployment(app)}
      initContainers:
        - {_container("copy-kit", 0, SITE_CAPABILITIES)}
{_copy_kit(f" && chown -R {AGENT_USER} /kit")}
      containers:
        - {_container("site", 0, SITE_CAPABILITIES)}
          command: [fedplat, site, start, /kit]
          volumeMounts:
            - {{name: kit, mountPath: /kit}}
            - {{name: temporary, mountPath: /tmp}}
            - {{name: run, mountPath: /run/fedplat}}
            - {{name: logs, mountPath: /var/log/fedplat}}
          # Mount the site's data here, read only, and name it in site.toml.
      volumes:
        - {{name: secret, secret: {{secretName: {app}-kit}}}}
        - {{name: kit, persistentVolumeClaim: {{claimName: {app}-state}}}}
        - {{name: temporary, emptyDir: {{}}}}
        - {{name: run, emptyDir: {{medium: Memory}}}}
        - {{name: logs, emptyDir: {{}}}}
"""


def _resource(consortium: str, name: str) -> str:
    """A name that Kubernetes takes for an object and for a label: lower case, at most 63 characters, hyphens."""
    return f"fedplat-{consortium}-{name}".lower().replace("_", "-")[:50].rstrip("-")


def _deployment(app: str, pod: str = "") -> str:
    """One replica, never two at once: a site's ledger and a server's database have one writer."""
    return f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {app}}}
spec:
  replicas: 1
  strategy: {{type: Recreate}}
  selector: {{matchLabels: {{app: {app}}}}}
  template:
    metadata: {{labels: {{app: {app}}}}}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {{seccompProfile: {{type: RuntimeDefault}}{pod}}}"""


def _container(name: str, user: int, capabilities: tuple[str, ...] = ()) -> str:
    added = f", add: [{', '.join(capabilities)}]" if capabilities else ""
    return f"""\
name: {name}
          image: {IMAGE}
          securityContext:
            runAsUser: {user}
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{drop: [ALL]{added}}}"""


def _copy_kit(then: str = "") -> str:
    """A secret is mounted read only: the kit is copied beside the state, private to its owner. All of it is renewed at
    each start but site.toml, which is the site's own, and a roster that is newer than the secret's."""
    return f"""\
          command: [sh, -c, {json.dumps(_COPY + then)}]
          volumeMounts: [{{name: secret, mountPath: /secret, readOnly: true}}, {{name: kit, mountPath: /kit}}]"""
