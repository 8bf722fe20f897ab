"""OpenAI's older completions, `/v1/completions`, and prompts that fill in what stands between two texts."""

from perdure.spi import Extension

EXTENSION = Extension(
    name="completions",
    protocols=("perdure.ext.completions.routes:PROTOCOL",),
    parts={"rt.infill_prompt": "perdure.ext.completions.infill:infill_prompt"},
)
