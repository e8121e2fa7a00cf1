"""Draft heads behind one interface, one file each."""
