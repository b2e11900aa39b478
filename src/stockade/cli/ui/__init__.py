"""What commands share: parsing, output, terminals, signals."""
