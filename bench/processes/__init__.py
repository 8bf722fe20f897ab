"""What is measured, one kind a process: ours, the bare library, and the peers."""
