/* probe.cu: the smallest kernel. Opening a device loads it, to learn at once whether this GPU and this driver take what
   the build compiled. */

extern "C" __global__ void esmm_probe(void) {}
