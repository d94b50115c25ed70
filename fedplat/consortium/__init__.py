"""A consortium: who its parties are, what each may do, and the keys that prove it."""
