"""The slots: what their sequences hold, which one a request gets, and how state gets in and out of them.

slot_cache        places requests, so that as little as possible is computed
slot_swapper      brings state into slots, and puts what they hold into the tiers
slot_choice       which slot a prompt gets, and from where: a pure function of what the slots hold
slot_index        what the slots hold, by their tokens
slot_checkpoints  how a sequence in a slot goes back, by the kind of memory
checkpoints       the checkpoints of one slot
reuse_reason      why no more of a prompt could be reused, in words
"""
