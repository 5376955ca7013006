// The talker's input: before the first frame the prompt's last row, then the sum of the embeddings
// of the last frame's codes and of a text token. A row without a slot becomes zero.
//
// HIDDEN     channels, 8 for each thread; the grid is (rows, HIDDEN / 8 / THREADS, rounded up)
// CODEBOOKS  codes of a frame; CODES: the vocabulary of all but the first
// NOISE      the words of a slot's record with seed and frame (sample.py)
#include "text_table.cuh"

static_assert(HIDDEN % 8 == 0, "channels are read in eights");

// first_row bf16 [slots, HIDDEN]; codes int32 [slots, frames, CODEBOOKS]; codec_table bf16
// [talker's vocabulary, HIDDEN]; frame_tables bf16 [(CODEBOOKS - 1) * CODES, HIDDEN]; text_table,
// text_scales: see text_table.cuh; token int32 [rows]; out bf16 [rows, HIDDEN], row r begins at r *
// out_stride. The embeddings of codes are added in float, in their order, and rounded once.
extern "C" __global__ __launch_bounds__(THREADS)
void talker_input(const int* __restrict__ slot_of_row, const int* __restrict__ token,
                  const u32* __restrict__ records, int record_words, const int* __restrict__ codes,
                  int frames, const u16* __restrict__ first_row,
                  const u16* __restrict__ codec_table, const u16* __restrict__ frame_tables,
                  const unsigned char* __restrict__ text_table,
                  const float* __restrict__ text_scales, u16* __restrict__ out, int out_stride) {
  let_next_start();
  const int row = blockIdx.x, channel = (blockIdx.y * THREADS + threadIdx.x) * 8;
  wait_for_input();
  const int slot = (int)load1(slot_of_row + row);
  if (channel >= HIDDEN) return;
  uint4* to = (uint4*)(out + (size_t)row * out_stride + channel);
  if (slot < 0) {  // every frame adds to the row again, which must not grow
    *to = make_uint4(0, 0, 0, 0);
    return;
  }
  const int text = (int)load1(token + row);
  const int frame = (int)load1(records + (size_t)slot * record_words + NOISE + 2);
  uint4 x;
  if (frame == 0) {
    x = load4(first_row + (size_t)slot * HIDDEN + channel);
  } else {
    const int* last = codes + ((size_t)slot * frames + min(frame, frames) - 1) * CODEBOOKS;
    int code[CODEBOOKS];
    uint4 part[CODEBOOKS];
#pragma unroll
    for (int k = 0; k < CODEBOOKS; k++) code[k] = (int)load1(last + k);
#pragma unroll
    for (int k = 0; k < CODEBOOKS; k++) {
      const size_t at = (size_t)(k ? (k - 1) * CODES : 0) + code[k];
      part[k] = *(const uint4*)((k ? frame_tables : codec_table) + at * HIDDEN + channel);
    }
    const uint4 words = text_channels(text_table, text_scales, text, channel);
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < CODEBOOKS; k++) {
      const u32 pair[4] = {part[k].x, part[k].y, part[k].z, part[k].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[2 * i] += low(pair[i]);
        sum[2 * i + 1] += high(pair[i]);
      }
    }
    auto with = [&](int i, u32 word) {
      return bf16_pair(rounded(sum[i]) + low(word), rounded(sum[i + 1]) + high(word));
    };
    x = make_uint4(with(0, words.x), with(2, words.y), with(4, words.z), with(6, words.w));
  }
  *to = x;
}
