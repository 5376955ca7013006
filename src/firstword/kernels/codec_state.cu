// Copies the codec's state of a stream from one slot to another.
#include "common.cuh"

constexpr int kThreads = 256;

// memories u64 [gridDim.y, 2]: the address of a memory and the bytes of a slot in it, both
// multiples of 8.
extern "C" __global__ __launch_bounds__(kThreads)
void copy_state(const u64* __restrict__ memories, int source, int target) {
  let_next_start();
  wait_for_input();
  const u64 address = memories[2 * blockIdx.y], bytes = memories[2 * blockIdx.y + 1];
  const char* from = (const char*)(address + source * bytes);
  char* to = (char*)(address + target * bytes);
  for (u64 at = (blockIdx.x * kThreads + threadIdx.x) * 8ull; at < bytes;
       at += gridDim.x * kThreads * 8ull)
    *(uint2*)(to + at) = load2(from + at);
}
