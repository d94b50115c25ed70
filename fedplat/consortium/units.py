"""systemd units and Kubernetes manifests: how an administrator keeps a server or a site running.

The SuperNode takes messages from the network, so it runs as a user of its own that can't read the site's data, keys and
ledger; systemd hands it the node key as a credential. In Kubernetes it is a container of its own, that mounts the node
key and nothing else of the kit.
"""

AGENT_USER, NODE_USER, SERVER_USER = "fedplat", "fedplat-node", "fedplat-server"
IMAGE = "fedplat:latest"
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
CapabilityBoundingSet=
SystemCallArchitectures=native
UMask=0077
Restart=always
RestartSec=2
"""
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
{_QUIET}{_HARDENED.format(devices="yes")}
[Install]
WantedBy=multi-user.target
"""


def site_unit(consortium: str, name: str) -> str:
    kit = f"/etc/fedplat/{consortium}/{name}"
    return f"""\
# The agent of site {name}: the kit belongs at {kit}, owned by {AGENT_USER}.
[Unit]
Description=fedplat site agent {name} of {consortium}
After=network-online.target
Wants=network-online.target

[Service]
User={AGENT_USER}
ExecStart=/usr/bin/env fedplat site start {kit} --no-supernode
# Add the directories of the data (read only) if they are under /home, and the ledger's if it is elsewhere.
ReadWritePaths={kit}
{_QUIET}{_HARDENED.format(devices="no")}
[Install]
WantedBy=multi-user.target
"""


def supernode_unit(consortium: str, name: str, link_port: int, node_port: int) -> str:
    kit = f"/etc/fedplat/{consortium}/{name}"
    state = f"fedplat-node/{name}"
    return f"""\
# The SuperNode of site {name}: transport only, as a user that can read nothing of the site.
[Unit]
Description=Flower SuperNode of fedplat site {name}
After=fedplat-site-{name}.service
Wants=fedplat-site-{name}.service

[Service]
User={NODE_USER}
LoadCredential=node:{kit}/node
LoadCredential=superexec.secret:{kit}/superexec.secret
InaccessiblePaths=-{kit}
StateDirectory={state}
Environment=FLWR_HOME=/var/lib/{state}
ExecStart=/usr/bin/env flower-supernode --insecure --superlink 127.0.0.1:{link_port} \\
    --auth-supernode-private-key ${{CREDENTIALS_DIRECTORY}}/node --isolation process \\
    --host 127.0.0.1 --port {node_port} --superexec-auth-secret-file ${{CREDENTIALS_DIRECTORY}}/superexec.secret
{_QUIET}{_HARDENED.format(devices="yes")}
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
{_deployment(app)}
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


def site_manifest(consortium: str, name: str, link_port: int, node_port: int) -> str:
    app = _resource(consortium, name)
    return f"""\
# Site {name}. First: kubectl create secret generic {app}-kit --from-file=KIT_DIRECTORY; kubectl create secret generic \
{app}-node --from-file=KIT_DIRECTORY/node --from-file=KIT_DIRECTORY/superexec.secret
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {app}-state}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 5Gi}}}}
---
{_deployment(app)}
      initContainers:
        - {_container("copy-kit", 10001)}
{_copy_kit()}
      containers:
        - {_container("agent", 10001)}
          command: [fedplat, site, start, /kit, --no-supernode]
          volumeMounts: [{{name: kit, mountPath: /kit}}, {{name: temporary, mountPath: /tmp}}]
          # Mount the site's data here, read only, and name it in site.toml.
        - {_container("supernode", 10002)}
          command: [flower-supernode, --insecure, --superlink, "127.0.0.1:{link_port}", --isolation, process,
                    --auth-supernode-private-key, /node/node, --host, 127.0.0.1, --port, "{node_port}",
                    --superexec-auth-secret-file, /node/superexec.secret]
          env:
            - {{name: FLWR_TELEMETRY_ENABLED, value: "0"}}
            - {{name: FLWR_DISABLE_UPDATE_CHECK, value: "1"}}
            - {{name: FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION, value: "1"}}
            - {{name: FLWR_HOME, value: /home-of-flower}}
          volumeMounts: [{{name: node, mountPath: /node, readOnly: true}}, {{name: flower, mountPath: /home-of-flower}}]
      volumes:
        - {{name: secret, secret: {{secretName: {app}-kit}}}}
        - {{name: node, secret: {{secretName: {app}-node}}}}
        - {{name: kit, persistentVolumeClaim: {{claimName: {app}-state}}}}
        - {{name: temporary, emptyDir: {{}}}}
        - {{name: flower, emptyDir: {{}}}}
"""


def _resource(consortium: str, name: str) -> str:
    """A name that Kubernetes takes for an object and for a label: lower case, at most 63 characters, hyphens."""
    return f"fedplat-{consortium}-{name}".lower().replace("_", "-")[:50].rstrip("-")


def _deployment(app: str) -> str:
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
      securityContext:
        runAsNonRoot: true
        fsGroup: 10000
        fsGroupChangePolicy: OnRootMismatch  # else every start would open the keys to the group
        seccompProfile: {{type: RuntimeDefault}}"""


def _container(name: str, user: int) -> str:
    return f"""\
name: {name}
          image: {IMAGE}
          securityContext:
            runAsUser: {user}
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{drop: [ALL]}}"""


def _copy_kit() -> str:
    """A secret is mounted read only and by group: the kit is copied beside the state, private to its owner. All of it
    is renewed at each start but site.toml, which is the site's own."""
    copy = "[ $n = site.toml ] && [ -e /kit/$n ] || cp -L $f /kit/$n"
    return f"""\
          command: [sh, -c, "umask 077; for f in /secret/*; do n=$(basename $f); {copy}; done"]
          volumeMounts: [{{name: secret, mountPath: /secret, readOnly: true}}, {{name: kit, mountPath: /kit}}]"""
