"""What is true of SHARP: machines, networks, programs, numerics and timing. Imports nothing of rtl or sim."""
