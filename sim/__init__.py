"""Everything that runs, measures or draws: Verilator builds, the bench, figures and the command line."""
