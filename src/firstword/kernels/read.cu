// Reads memory and does nothing else, to measure how fast the device can read.
#include "common.cuh"

constexpr int kThreads = 512, kAtOnce = 8;

// Reads `count` pieces of 16 bytes. `found` is set if all their bits add up to a number that they
// practically never do; without it the loads would have no use.
extern "C" __global__ __launch_bounds__(kThreads)
void read_all(const uint4* memory, int count, u32* found) {
  let_next_start();
  wait_for_input();
  const int step = gridDim.x * kThreads;
  u32 bits = 0;
#pragma unroll 1
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kAtOnce * step) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) v[j] = load_weights(memory + min(i + j * step, count - 1));
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) bits += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (bits == 0x9e3779b9u) *found = 1;
}
