"""An interpreter of PTX: runs the compiled text of a GPU kernel without a GPU, and looks for its faults.

A kernel of Pallas' Mosaic GPU is compiled for a target that is only described. The machine here executes the
text that ptxas would get: lanes of a warp in NumPy, warps and thread blocks in random order, asynchronous
copies and products that land late. It models PTX, not ptxas and not a chip.
"""
