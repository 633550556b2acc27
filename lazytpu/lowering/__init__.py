"""From the IR to HLO: one registry of rules, one file a family of ops."""
