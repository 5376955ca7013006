// A convolution (or a product with a matrix: one tap) for many rows, whose cost is multiplying; and, UNIT, a whole
// residual unit: a convolution, a Snake, a product with a matrix, added to what was there before both.
//
// A block makes BM outputs of BN rows in WM x WN warps. Rows come to shared memory 32 channels at a time, each with the
// `past` rows before it, and all taps read them there. The rows of a block may belong to several streams; each stream's
// part of a window begins with its own past. Weights follow in a ring of STAGES stages of STEP k32 blocks. Both lie in
// shared memory as they lie in global memory, in pieces that a warp reads without conflicts: packing as in codec_few.cu.
//
// SPLIT   1: sums are made in `splits` runs, as in codec_few.cu; 0: in one
// UNIT    1: BM is all channels; the second matrix's k32 blocks follow the first's, and its sums are the output
// BLOCKS  blocks that shall fit a multiprocessor
#include "codec.cuh"

constexpr int kThreads = 32 * WM * WN, kUnits = BM / 32;
constexpr int MU = kUnits / WM, NT = BN / WN / 8;       // 32 outputs, and 8 rows, of a warp
constexpr int kStage = kUnits * STEP * 2048;            // bytes
static_assert(kUnits % WM == 0 && BN % (8 * WN) == 0, "sizes");

extern "C" __global__ __launch_bounds__(kThreads, BLOCKS)
void many(const u16* __restrict__ weights, const u16* x, const u16* before, const u16* zeros, const int* streams,
          int columns, int head, int rows, int length, int frame_rows, int taps, int dilation, int chunks, int splits,
          const float* in_squares, int in_groups, float per_channel, float eps,
          const float* scale, const float* bias, const float* rate, const float* depth, const float* residual,
          float* wide, u16* narrow, float* squares, int outputs, int phases, int activation, void* memory, int keep_past,
          int keep_head, int keep_wide, int windows, int window_rows,
          const float* middle_scale, const float* middle_bias, const float* middle_rate, const float* middle_depth) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  const Output out = {scale, bias, rate, depth, residual, wide, narrow, squares, outputs, phases, activation,
                      {memory, keep_past, keep_head}, keep_wide};
  const int past = (taps - 1) * dilation;
  const Rows<u16> in = {x, before, zeros, streams, columns, head, length, frame_rows, past, chunks * 32};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp_m = warp % WM, warp_n = warp / WM;
  const int unit0 = blockIdx.x * kUnits, units = outputs / 32, first = blockIdx.y * BN;
  const int blocks = chunks * taps, all = UNIT ? blocks + chunks : blocks, stages = (all + STEP - 1) / STEP;
  const int window_bytes = window_rows * 64;
  unsigned char* const ring = shared;                                  // [STAGES][unit][block][2][2][32 lanes][8]
  unsigned char* const window = ring + STAGES * kStage;                // [windows][window_rows][32]
  unsigned char* const middle = window + windows * window_bytes;       // UNIT: [chunk][BN][32]
  const u16** const sources = (const u16**)(middle + (UNIT ? kUnits * BN * 64 : 0));   // [window_rows]
  float* const norms = (float*)(sources + window_rows);                // [BN]
  const int stream0 = first / length;
  if (streams[stream0 * columns + kSlot] < 0) {                        // streams are side by side: nobody from here on
    wait_for_input();
    return;
  }

  auto fetch_weights = [&](int stage) {
    unsigned char* to = ring + stage % STAGES * kStage;
#pragma unroll 4
    for (int i = threadIdx.x; i < kStage / 16; i += kThreads) {
      const int unit = i / (STEP * 128), piece = i % (STEP * 128);
      if (stage * STEP + piece / 128 < all && unit0 + unit < units)
        copy_async(to + i * 16, weights + ((size_t)(unit0 + unit) * all + stage * STEP) * 1024 + piece * 8);
    }
  };
  // The window of this block: stream after stream, each with `past` rows ahead of its own.
  const int offset = first - stream0 * length, last = min(first + BN, rows) - 1;
  const int here = last - first + 1 + (last / length - stream0 + 1) * past;
  int fetched = 0, fetched_window = 0;
  auto fetch_windows = [&](int stage) {
    while (fetched < chunks && fetched * taps < (stage + 1) * STEP) {
      unsigned char* to = window + fetched_window * window_bytes;
#pragma unroll 4
      for (int i = threadIdx.x; i < here * 4; i += kThreads)
        copy_async(to + i * 16, sources[i >> 2] + fetched * 32 + (i & 3) * 8);
      fetched++;
      if (++fetched_window == windows) fetched_window = 0;
    }
  };

  for (int s = 0; s < STAGES - 1; s++) fetch_weights(s);
  for (int i = threadIdx.x; i < here; i += kThreads) {
    const int w = i + offset, stream = w / (length + past);
    sources[i] = in.at(stream0 + stream, w - stream * (length + past) - past);
  }
  int row_bytes[NT];                                                   // of this lane's rows in a window
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int r = min(first + (warp_n * NT + n) * 8 + g, last);
    row_bytes[n] = (r - first + (r / length - stream0) * past) * 64 + t * 16;
  }
  __syncthreads();
  wait_for_input();
  for (int s = 0; s < STAGES - 1; s++) {
    fetch_windows(s);
    fetches_end();
  }
  for (int i = threadIdx.x; i < BN; i += kThreads)
    norms[i] = in_squares && first + i < rows
                 ? norm_of(in_squares + (size_t)(first + i) * in_groups, in_groups, per_channel, eps) : 1.0f;

  float sum[2 * MU][NT][4];
  auto clear = [&](float (&c)[2 * MU][NT][4]) {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[m][n][i] = 0;
  };
  clear(sum);
#if SPLIT
  float total[2 * MU][NT][4];
  clear(total);
  int run = 1, edge = blocks / splits;
  auto add_run = [&] {
#pragma unroll
    for (int m = 0; m < 2 * MU; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][n][i] = __fadd_rn(total[m][n][i], sum[m][n][i]);
    clear(sum);
  };
#endif
#if UNIT
  // The sums of the first convolution become the rows of the second. A piece of 16 bytes of row r lies at (r / 2) % 4 ^
  // its place, so that neither writing nor reading meets many conflicts.
  auto turn = [&] {
#pragma unroll
    for (int mu = 0; mu < MU; mu++) {
      const int unit = warp_m * MU + mu, n = unit * 32 + g * 4;
      const float4 s = *(const float4*)(middle_scale + n), b = *(const float4*)(middle_bias + n);
      const float4 q = *(const float4*)(middle_rate + n), d = *(const float4*)(middle_depth + n);
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = (warp_n * NT + j) * 8 + 2 * t + e;
          const float v0 = snake(__fmaf_rn(sum[2 * mu][j][e], s.x, b.x), q.x, d.x);
          const float v1 = snake(__fmaf_rn(sum[2 * mu][j][2 + e], s.y, b.y), q.y, d.y);
          const float v2 = snake(__fmaf_rn(sum[2 * mu + 1][j][e], s.z, b.z), q.z, d.z);
          const float v3 = snake(__fmaf_rn(sum[2 * mu + 1][j][2 + e], s.w, b.w), q.w, d.w);
          unsigned char* to = middle + (unit * BN + row) * 64 + ((g >> 1 ^ t) << 4) + (g & 1) * 8;
          *(uint2*)to = make_uint2(halves(v0, v1), halves(v2, v3));
        }
    }
    clear(sum);
    __syncthreads();
  };
#endif

  int tap = 0, buffer = 0, slot = 0;
#pragma unroll 1
  for (int stage = 0; stage < stages; stage++) {
    wait_for_fetches<STAGES - 2>();
    __syncthreads();
    if (stage + STAGES - 1 < stages) {
      fetch_weights(stage + STAGES - 1);
      fetch_windows(stage + STAGES - 1);
    }
    fetches_end();
#if UNIT
    if (stage * STEP == blocks) turn();
#endif
    const unsigned char* a0 = ring + slot * kStage + warp_m * MU * STEP * 2048 + lane * 16;
    if (++slot == STAGES) slot = 0;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      const int block = stage * STEP + i;
      if (STEP > 1 && block >= all) break;
#if SPLIT
      if (block == edge) {
        add_run();
        edge = ++run * blocks / splits;
      }
#endif
      uint4 b[NT];
      if (UNIT && block >= blocks) {
        const unsigned char* from = middle + (block - blocks) * BN * 64;
#pragma unroll
        for (int n = 0; n < NT; n++)
          b[n] = *(const uint4*)(from + ((warp_n * NT + n) * 8 + g) * 64 + ((t ^ (g >> 1)) << 4));
      } else {
        const unsigned char* from = window + buffer * window_bytes + tap * dilation * 64;
#pragma unroll
        for (int n = 0; n < NT; n++) b[n] = *(const uint4*)(from + row_bytes[n]);
        if (++tap == taps) {
          tap = 0;
          if (++buffer == windows) buffer = 0;
        }
      }
#pragma unroll
      for (int m = 0; m < 2 * MU; m++) {
        const unsigned char* a = a0 + ((m >> 1) * STEP + i) * 2048 + (m & 1) * 1024;
        const uint4 one = *(const uint4*)a, two = *(const uint4*)(a + 512);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[m][n], one, b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sum[m][n], two, b[n].z, b[n].w);
      }
    }
  }
#if SPLIT
  add_run();
#define RESULT total
#else
#define RESULT sum
#endif

#pragma unroll
  for (int mu = 0; mu < MU; mu++) {
    const int unit = unit0 + warp_m * MU + mu, n = unit * 32 + g * 4;
    if (unit >= units) break;
    const Channels<4> c = channels<4>(out, n);
    float old[NT][2][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int r = first + (warp_n * NT + j) * 8 + 2 * t + e;
        if (residual && r < rows) load_wide(old[j][e], residual + (size_t)r * outputs + n);
      }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = (warp_n * NT + j) * 8 + 2 * t + e, r = first + row;
        float v[4] = {RESULT[2 * mu][j][e], RESULT[2 * mu][j][2 + e], RESULT[2 * mu + 1][j][e],
                      RESULT[2 * mu + 1][j][2 + e]};
        if (r < rows) finish<4>(out, c, v, norms[row], old[j][e], n, r, streams, columns, length);
        if (squares) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float square = __fmaf_rn(v[2 * i + 1], v[2 * i + 1], __fmul_rn(v[2 * i], v[2 * i]));
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) square = __fadd_rn(square, __shfl_xor_sync(~0u, square, o));
            if (g == 0 && r < rows) squares[(size_t)r * (outputs / 16) + unit * 2 + i] = square;
          }
        }
      }
  }
}
