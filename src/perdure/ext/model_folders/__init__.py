"""Folders of models that a server watches: files that come are served, and those that go are not any more.

watch   the thread that looks
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="model_folders", parts={"watch of model folders": "perdure.ext.model_folders.watch:FolderWatch"}
)
