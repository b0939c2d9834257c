"""Values in 4 and 8 bits: the tables of bitsandbytes, and the codecs of a quantized base."""
