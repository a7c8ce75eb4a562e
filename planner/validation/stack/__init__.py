"""What a row says about its software and machine: which stack it is, and how it differs from that stack's usual."""
