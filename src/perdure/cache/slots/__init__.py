"""The slots: what their sequences hold, which one a request gets, and how state gets in and out of them.

checkpoints  how the sequence of a slot goes back, by the kind of memory
checkpoint_store  the checkpoints of memories that need them
placement    the slots, which of them a prompt gets and from where; why no more of it could be reused
swap_slots   where conversations wait on the device
cache        places requests, so that as little as possible is computed: swaps state in and out of slots
"""
