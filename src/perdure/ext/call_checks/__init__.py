"""Tool calls that a model made, judged by the schemas of their tools: `problems` of a reply.

arguments  what is wrong with a call, in a sentence
schema     JSON Schema of clients: nothing is fetched, patterns take linear time, and the work has a limit
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="call_checks", parts={"problem of a call": "perdure.ext.call_checks.arguments:check_arguments"}
)
