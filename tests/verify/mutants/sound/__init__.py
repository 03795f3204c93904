"""Operations in vectorised NumPy, as somebody else might write them: right, until a mutant changes a line."""
