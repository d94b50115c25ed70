"""The accountants behind `privacy.accounting`: PLD, RDP and PRV, and the table of who takes what."""
