"""Encryption of state at rest: `--encrypt`.

cipher   names and bytes that only a key can make, or read
codec    block files and rows of an index, encrypted
folder   keys, the mark of a folder that is encrypted, and how a plain one becomes so
"""

from perdure.spi import Extension

EXTENSION = Extension(name="encryption", encryption="perdure.ext.encryption.folder:choose")
