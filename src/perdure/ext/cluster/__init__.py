"""Several machines: sessions in PostgreSQL, blocks of state in shared places, replicas under Ray Serve.

postgres     the session store in PostgreSQL
remote       how the kernel reaches it: by URL, and by the folder that stands for a database
places       a directory, a bucket, a Redis server
shared       the block tier in such a place
shared_keys  keys of clients, and what they use, over all replicas
checks       what `perdure doctor` looks at
where        `/v1/where`: what a router asks a replica
ray          replicas under Ray Serve
command      `perdure cluster`
"""

from perdure.spi import Extension, ExtensionCommand

_STORE = "perdure.ext.cluster.remote:STORE"
_TIER = "perdure.ext.cluster.shared:OPENER"

EXTENSION = Extension(
    name="cluster",
    needs=("encryption",),
    stores={"postgresql": _STORE, "postgres": _STORE},
    tiers={"file": _TIER, "s3": _TIER, "redis": _TIER, "rediss": _TIER},
    checks=("perdure.ext.cluster.checks:findings",),
    routes=("perdure.ext.cluster.where:router",),
    commands=(
        ExtensionCommand(name="cluster", target="perdure.ext.cluster.command:app", section="Serve a model"),
    ),
)
