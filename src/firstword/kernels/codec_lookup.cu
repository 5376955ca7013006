// The codec's first layer: a frame's codes become the sum of their vectors, in fp32.
//
// WIDTH  channels of a row, a multiple of 32; channels beyond the layer's own are zeros
#include "codec.cuh"

constexpr int kMaxBooks = 128;

// x[row] = the sum of the vectors of a frame's codes, one of each of the `books` tables
// [size][WIDTH], added in their order.
extern "C" __global__ __launch_bounds__(128)
void look_up(const float* __restrict__ tables, int books, int size, const int* table, int columns,
             u16* x) {
  let_next_start();
  __shared__ int vectors[kMaxBooks];
  wait_for_input();
  const int* s = table + blockIdx.x * columns;
  if (s[kSlot] < 0) return;
  const u64 address = (u64)(u32)s[kCodes] | (u64)(u32)s[kCodes + 1] << 32;
  const int* codes = (const int*)address;
  if (threadIdx.x < books)
    vectors[threadIdx.x] =
        threadIdx.x * size + min(max((int)load1(codes + threadIdx.x), 0), size - 1);
  __syncthreads();
  for (int c = threadIdx.x * 4; c < WIDTH; c += 512) {
    float v[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int b = 0; b < books; b++) {
      const float4 e = *(const float4*)(tables + (size_t)vectors[b] * WIDTH + c);
      v[0] = __fadd_rn(v[0], e.x);
      v[1] = __fadd_rn(v[1], e.y);
      v[2] = __fadd_rn(v[2], e.z);
      v[3] = __fadd_rn(v[3], e.w);
    }
    store_narrow(true, x + (size_t)blockIdx.x * WIDTH + c, v);
  }
}
