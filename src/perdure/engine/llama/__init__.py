"""llama.cpp. The only modules that touch foreign memory."""
