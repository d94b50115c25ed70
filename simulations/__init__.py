"""Virtual clients on one machine: LocalGrid, the same client code that runs at a site, ready-made scenarios."""
