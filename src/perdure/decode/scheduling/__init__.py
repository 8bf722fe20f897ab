"""Scheduling: which sequences get a slot, and what the next steps compute. No thread, no engine.

scheduler  admits and plans: pure functions of sequences and a budget
pace       how large a chunk of a prompt may be while others wait
"""
