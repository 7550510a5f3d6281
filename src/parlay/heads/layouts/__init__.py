"""Published layouts of heads: reads them as heads of Parlay's, and writes them."""
