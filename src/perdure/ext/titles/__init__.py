"""Titles of conversations, written by the model while it is idle.

title   the request for a title, and what is taken of the reply
routes  `/v1/sessions/{name}/title`
"""

from perdure.spi import Extension

EXTENSION = Extension(name="titles", routes=("perdure.ext.titles.routes:router",))
