// Which loops of a wheel's library this processor can run. build.py compiles loop.cpp once for each.

// The end of the names of the best ones; `VARIANTS` in build.py has the same.
extern "C" const char *sab_variant() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4"))
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? "_v4b" : "_v4";
    if (__builtin_cpu_supports("x86-64-v3")) return "_v3";
    return "_v1";
}
