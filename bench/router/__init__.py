"""What a router costs a turn and a chunk: kvloop beside its peers, against the same fast engine that only pretends."""
