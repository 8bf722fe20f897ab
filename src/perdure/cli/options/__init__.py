"""Options of the commands: those that several share, groups of them, and what others call them."""
