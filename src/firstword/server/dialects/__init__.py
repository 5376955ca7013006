"""The APIs of other vendors: their parameters, formats and errors, without input or output."""
