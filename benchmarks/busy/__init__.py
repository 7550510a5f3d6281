"""How decoding fares on a machine whose cores others use too."""
