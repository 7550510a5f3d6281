"""Budget policies: how many nodes each sequence drafts, and which of them are worth verifying."""
