"""The slots: what their sequences hold, which one a request gets, and how state gets in and out of them.

slot_cache        places requests, so that as little as possible is computed
slot              the slots: which are idle, and when each was last used
slot_planner      weighs the ways to serve a prompt, from what the slots and the tiers hold now
slot_swapper      brings state into slots, and puts what they hold into swap slots or the tiers
slot_choice       which slot a prompt gets, and from where: a pure function of what the slots hold; why no
                  more of it could be reused
slot_index        what the slots hold, by their tokens
slot_checkpoints  the checkpoints of a slot, and how its sequence goes back, by the kind of memory
"""
