"""One thread for the whole suite: its models are tiny, and threads that wait for each other cost more than they do."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
