"""Mechanisms, accounting, the ledger, secure aggregation, reports. Pure: no Flower, no training loop.

This room is furnished by the issues on differential privacy and secure aggregation; its walls (what it
may import, who may import it) stand already and are checked by import-linter.
"""
