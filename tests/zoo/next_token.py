"""Models that have next-token layers (MTP) behind their own."""

from __future__ import annotations

from . import experts
from .attention import WIDTH
from .sheet import Sheet


def deepseek2(sheet: Sheet, vocabulary: int) -> None:
    sheet.set(nextn_predict_layers=1)
    experts.deepseek2(sheet, vocabulary, layers=4)
    sheet.matrix("blk.3.nextn.eh_proj.weight", WIDTH, 2 * WIDTH)
    sheet.vector("blk.3.nextn.enorm.weight", WIDTH)
    sheet.vector("blk.3.nextn.hnorm.weight", WIDTH)
