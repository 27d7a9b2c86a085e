"""Pictures of chat messages: found, decoded in worker processes, made to fit, remembered."""
