"""One module per engine. It runs in that engine's environment, so it imports only modules of Parlay that need no
library."""
