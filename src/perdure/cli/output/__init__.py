"""What commands print: text for a terminal or a pipe, progress, replies, JSON."""
