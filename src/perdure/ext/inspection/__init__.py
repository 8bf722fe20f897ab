"""Looking inside: keys and values compared, the logit lens, a report as one HTML page, live events, cached
blocks, and where the words of prompts come from."""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="inspection",
    needs=("weights",),
    commands=(
        ExtensionCommand(name="analyse", target="perdure.ext.inspection.commands:analyse", section="Models"),
        ExtensionCommand(name="vectors", target="perdure.ext.inspection.commands:vectors", section="Models"),
    ),
    routes=("perdure.ext.inspection.routes:router", "perdure.ext.inspection.events:router"),
    parts={
        "rt.cache.blocks": "perdure.ext.inspection.cache_listing:CacheListing",
        "rt.cache.runs": "perdure.ext.inspection.cache_listing:CacheListing",
        "PERDURE_CHECK_PROMPTS": "perdure.ext.inspection.provenance:Provenance",
        "ctx.kv": "perdure.ext.inspection.kv_reader:read_sequence",
        "ctx.kv_of": "perdure.ext.inspection.kv_reader:read_rows",
        "ctx.trace": "perdure.ext.inspection.tracer:trace",
        "a context with trace": "perdure.ext.inspection.tracer:TracedCore",
    },
    page_routes=("perdure.ext.inspection.routes:page_router",),
)
