"""The operations for NVIDIA GPUs, one file an operation, with the signatures of the functions in `kernels` that call them.

Each file has the kernel, its launcher, its tile table and `AOT_VARIANTS`, what a server launches, for `kernels.aot`. Launchers read
no tensor's contents and choose tiles from shapes alone: nothing waits for the device, and CUDA graphs capture them. Tiles come out
of tables, not out of `triton.autotune`: the same kernel in every run, no first request that waits, and no driver needed to compile.
`enable_fp_fusion` is set at each launch, since its default changes between Triton versions and with it the last bits of results.
"""
