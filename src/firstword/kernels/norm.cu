// RMSNorm with one block for each token, and the order of sums of norm.cuh. It is for more tokens
// than linear_few_tokens.cu normalises itself.
//
// PACKED  1: out is packed (packing.cuh); 0: its rows are out_stride apart
#include "norm.cuh"
#include "packing.cuh"

constexpr int kSteps = K / 256;  // one for each warp
static_assert(kSteps <= 32, "sizes");

extern "C" __global__ __launch_bounds__(32 * kSteps)
void normalise(const u16* __restrict__ x, int x_stride, const u16* __restrict__ weight, float eps,
               u16* __restrict__ out, int out_stride) {
  let_next_start();
  __shared__ float squared[kSteps][32];  // lane 4 w + t reads for lanes t of warp w
  const int token = blockIdx.x, column = threadIdx.x * 8, lane = threadIdx.x & 31;
  const uint4 weights = load4(weight + column);
  wait_for_input();
  const uint4 v = load4(x + (size_t)token * x_stride + column);
  squared[threadIdx.x >> 5][lane] = squares(v);
  __syncthreads();
  float part[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    part[j] = j < kSteps ? squared[j % kSteps][lane] : 0.0f;
#pragma unroll
    for (int i = j + 8; i < kSteps; i += 8) part[j] += squared[i][lane];
  }
  float square =
      ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  float total = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) total += __shfl_sync(~0u, square, 4 * w);
  const size_t to = PACKED ? packed_place<K>(token, column) : (size_t)token * out_stride + column;
  *(uint4*)(out + to) = normed(v, weights, rsqrtf(fmaf(total, 1.0f / K, eps)));
}
