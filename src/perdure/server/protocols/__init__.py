"""Protocols that clients speak. Each reads requests into one inner form, `ReplyRequest`, and writes what
comes of them, `ChatDelta`, `ChatReply` and `ApiError`, in its own shapes. None of them knows the engine."""
