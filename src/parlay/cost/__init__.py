"""The cost of forwards: how many seconds they take, by rows and context, and how much energy."""
