"""The parts of a decoder layer, one idea a file."""
