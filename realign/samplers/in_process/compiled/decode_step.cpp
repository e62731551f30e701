// One decode step of a Llama-style trunk in fp32 on one CPU core: the counterpart of `fused_layers.FusedTrunk`.
// Weights may be stored in bf16, of which half as many bytes are read. Their values are exact in fp32.
//
// `library.py` compiles this file, and `trunk.py` calls `realign_decode` with raw pointers, so it
// needs no headers of torch. A row's result depends only on this row: every sum has a fixed order, which is the same
// for any number of rows. Rows can therefore be divided among threads without changing a bit.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// WIDTH vectors of LANES floats by HEIGHT rows of sums fit the registers of the instruction set.
#if defined(__AVX512F__)
constexpr int LANES = 16, WIDTH = 4, HEIGHT = 6;
#elif defined(__AVX__)
constexpr int LANES = 8, WIDTH = 2, HEIGHT = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, WIDTH = 4, HEIGHT = 6;
#else
constexpr int LANES = 4, WIDTH = 2, HEIGHT = 6;
#endif

// Inputs summed before the next block of columns, so that a block of weights stays in the cache for all rows.
constexpr int64_t DEPTH = 256;
// Distance in inputs between the weights that are multiplied and those that are fetched.
constexpr int64_t AHEAD = 8;

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t IVec __attribute__((vector_size(LANES * sizeof(int32_t))));

// A number in bf16: the upper half of a float.
struct Half {
    uint16_t bits;
};

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const Half* p) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, IVec) << 16);
}

inline float value(float x) { return x; }

inline float value(Half x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec spread(float x) { return x - Vec{}; }

inline float sum(Vec v) {
    float x[LANES];
    std::memcpy(x, &v, sizeof v);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

inline Vec select(IVec where, Vec a, Vec b) { return (Vec)((where & (IVec)a) | (~where & (IVec)b)); }

// exp with a relative error of about 1e-7; arguments are limited to the range without infinities and denormals.
inline Vec exponential(Vec x) {
    x = select(x < -87.0f, spread(-87.0f), x);
    x = select(x > 88.0f, spread(88.0f), x);
    // Reduction and polynomial of Cephes' expf. ln 2 has two parts: 355 / 512, whose product with n is exact, and the
    // rest.
    const Vec shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Vec n = shifted - 12582912.0f;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Vec y = p * r * r + r + 1.0f;
    const IVec power = ((IVec)shifted - (IVec)spread(12582912.0f) + 127) << 23;
    return y * (Vec)power;
}

// Adds a[R, depth] * w[depth, W * LANES] to c[R, W * LANES]. The product is summed first, which rounds less.
template <int R, int W, typename T>
inline void tile(const float* a, int64_t lda, const T* w, int64_t ldw, float* c, int64_t ldc, int64_t depth) {
    Vec sums[R][W] = {};
    for (int64_t k = 0; k < depth; k++, w += ldw) {
        Vec weights[W];
        for (int j = 0; j < W; j++) {
            __builtin_prefetch(w + AHEAD * ldw + j * LANES);
            weights[j] = load(w + j * LANES);
        }
        for (int r = 0; r < R; r++) {
            const float x = a[r * lda + k];
            for (int j = 0; j < W; j++) sums[r][j] += x * weights[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(c + r * ldc + j * LANES, load(c + r * ldc + j * LANES) + sums[r][j]);
}

// The same for the columns from `first` on.
template <int R, typename T>
void add_rows(const float* a, int64_t lda, const T* w, int64_t ldw, float* c, int64_t ldc, int64_t depth,
              int64_t first, int64_t columns) {
    int64_t j = first;
    for (; j + WIDTH * LANES <= columns; j += WIDTH * LANES) tile<R, WIDTH>(a, lda, w + j, ldw, c + j, ldc, depth);
    for (; j + LANES <= columns; j += LANES) tile<R, 1>(a, lda, w + j, ldw, c + j, ldc, depth);
    for (; j < columns; j++)
        for (int r = 0; r < R; r++) {
            float s = 0;
            for (int64_t k = 0; k < depth; k++) s = std::fma(a[r * lda + k], value(w[k * ldw + j]), s);
            c[r * ldc + j] += s;
        }
}

// The same for the first of `rows` rows, at most HEIGHT of them.
template <typename T>
inline void add_some(int64_t rows, const float* a, int64_t lda, const T* w, int64_t ldw, float* c, int64_t ldc,
                     int64_t depth, int64_t columns) {
    switch (rows) {
        case 1: return add_rows<1>(a, lda, w, ldw, c, ldc, depth, 0, columns);
        case 2: return add_rows<2>(a, lda, w, ldw, c, ldc, depth, 0, columns);
        case 3: return add_rows<3>(a, lda, w, ldw, c, ldc, depth, 0, columns);
        case 4: return add_rows<4>(a, lda, w, ldw, c, ldc, depth, 0, columns);
        case 5: return add_rows<5>(a, lda, w, ldw, c, ldc, depth, 0, columns);
        default: return add_rows<HEIGHT>(a, lda, w, ldw, c, ldc, depth, 0, columns);
    }
}

// One or two rows: wide blocks of columns, which read long pieces of memory.
template <int R, int W, typename T>
void add_few(const float* a, int64_t lda, const T* w, int64_t ldw, int64_t columns, float* c, int64_t ldc,
             int64_t depth) {
    int64_t j = 0;
    for (; j + W * LANES <= columns; j += W * LANES) tile<R, W>(a, lda, w + j, ldw, c + j, ldc, depth);
    add_rows<R>(a, lda, w, ldw, c, ldc, depth, j, columns);
}

// c[rows, columns] += a[rows, inputs] * w[inputs, columns]
template <typename T>
void add_product(int64_t rows, const float* a, int64_t lda, const T* w, int64_t ldw, int64_t inputs, int64_t columns,
                 float* c, int64_t ldc) {
    for (int64_t k = 0; k < inputs; k += DEPTH) {
        const int64_t depth = inputs - k < DEPTH ? inputs - k : DEPTH;
        const T* part = w + k * ldw;
        if (rows == 1) {
            add_few<1, 4 * WIDTH>(a + k, lda, part, ldw, columns, c, ldc, depth);
            continue;
        }
        if (rows == 2) {
            add_few<2, 2 * WIDTH>(a + k, lda, part, ldw, columns, c, ldc, depth);
            continue;
        }
        for (int64_t j = 0; j < columns; j += WIDTH * LANES) {
            const int64_t some = columns - j < WIDTH * LANES ? columns - j : WIDTH * LANES;
            for (int64_t r = 0; r < rows; r += HEIGHT)
                add_some(rows - r, a + k + r * lda, lda, part + j, ldw, c + r * ldc + j, ldc, depth, some);
        }
    }
}

// The same for a weight that is stored in bf16 if `half` is not 0, else in fp32.
void add_product(bool half, int64_t rows, const float* a, int64_t lda, const void* w, int64_t ldw, int64_t inputs,
                 int64_t columns, float* c, int64_t ldc) {
    if (half)
        add_product(rows, a, lda, static_cast<const Half*>(w), ldw, inputs, columns, c, ldc);
    else
        add_product(rows, a, lda, static_cast<const float*>(w), ldw, inputs, columns, c, ldc);
}

void start_with(int64_t rows, const float* bias, int64_t columns, float* c) {
    for (int64_t r = 0; r < rows; r++) {
        if (bias)
            std::memcpy(c + r * columns, bias, columns * sizeof(float));
        else
            std::memset(c + r * columns, 0, columns * sizeof(float));
    }
}

void add_bias(int64_t rows, const float* bias, int64_t columns, float* c) {
    if (!bias) return;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++) c[r * columns + i] += bias[i];
}

float dot(const float* a, const float* b, int64_t n) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += load(a + i + j * LANES) * load(b + i + j * LANES);
    for (; i + LANES <= n; i += LANES) sums[0] += load(a + i) * load(b + i);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) total = std::fma(a[i], b[i], total);
    return total;
}

// y = x / sqrt(|x|^2 + floor^2) * weight; `y` may be `x`
void normalize(const float* x, const float* weight, float floor, int64_t n, float* y) {
    const float scale = 1.0f / std::sqrt(dot(x, x, n) + floor * floor);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

template <int W>
inline void mix(const float* weights, const float* values, int64_t size, int64_t count, float scale, float* out) {
    Vec sums[W] = {};
    for (int64_t t = 0; t < count; t++)
        for (int j = 0; j < W; j++) sums[j] += weights[t] * load(values + t * size + j * LANES);
    for (int j = 0; j < W; j++) store(out + j * LANES, sums[j] * scale);
}

// Attention of one query to `count` keys and values [count, size]; `scores` has room for count + LANES floats.
void attend(const float* query, const float* keys, const float* values, int64_t size, int64_t count, float scaling,
            float* scores, float* out) {
    float most = -INFINITY;
    for (int64_t t = 0; t < count; t++) {
        scores[t] = dot(query, keys + t * size, size) * scaling;
        most = scores[t] > most ? scores[t] : most;
    }
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    // The padding becomes exp(-87), which changes no digit of a sum whose largest term is 1.
    for (int64_t t = count; t < padded; t++) scores[t] = -INFINITY;
    Vec totals = {};
    for (int64_t t = 0; t < padded; t += LANES) {
        const Vec e = exponential(load(scores + t) - most);
        store(scores + t, e);
        totals += e;
    }
    const float scale = 1.0f / sum(totals);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) mix<4>(scores, values + i, size, count, scale, out + i);
    for (; i + LANES <= size; i += LANES) mix<1>(scores, values + i, size, count, scale, out + i);
    for (; i < size; i++) {
        float total = 0;
        for (int64_t t = 0; t < count; t++) total = std::fma(scores[t], values[t * size + i], total);
        out[i] = total * scale;
    }
}

// gate = silu(gate) * up
void activate(float* gate, const float* up, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Vec g = load(gate + i);
        store(gate + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    if (i == n) return;
    Vec g = {}, u = {};
    std::memcpy(&g, gate + i, (n - i) * sizeof(float));
    std::memcpy(&u, up + i, (n - i) * sizeof(float));
    const Vec y = g / (1.0f + exponential(-g)) * u;
    std::memcpy(gate + i, &y, (n - i) * sizeof(float));
}

}  // namespace

extern "C" {

// Weights are [inputs, outputs]; a bias or norm that the layer lacks is null. `trunk.py` has the same fields.
struct Layer {
    const float* attention_norm;
    const void* qkv;
    const float *qkv_bias, *qk_norm;
    const void* output;
    const float *output_bias, *mlp_norm;
    const void* gate_up;
    const float* gate_up_bias;
    const void* down;
    const float* down_bias;
    float *keys, *values;  // [slots, key heads, cache length, head size]
    int64_t queries, groups, window, inner;  // query heads, key heads, sliding window or 0, size of the gate
    float attention_floor, qk_floor, mlp_floor, scaling;
};

struct Trunk {
    const Layer* layers;
    const float *embedding, *turns, *norm;  // turns: [positions, head size / 2] pairs of cosine and sine
    int64_t n_layers, hidden, head_size, cache_length, half;  // half: 1 if the layers' weights are stored in bf16
    float floor;
};

// Numbers of floats that one row, and one call, need as scratch memory.
int64_t realign_row_scratch(const Trunk* trunk) {
    int64_t most = 0;
    for (int64_t i = 0; i < trunk->n_layers; i++) {
        const Layer& l = trunk->layers[i];
        const int64_t floats = (2 * l.queries + 2 * l.groups) * trunk->head_size + 2 * l.inner;
        most = floats > most ? floats : most;
    }
    return most + trunk->hidden;
}

int64_t realign_call_scratch(const Trunk* trunk) { return trunk->cache_length + LANES; }

// Writes the last hidden states of one new token per row to `x` [rows, hidden], and its keys and values to the cache.
// Row b is in slot first_slot + b * slot_step. With a step of 0 the rows are tokens of one text, by position.
void realign_decode(const Trunk* trunk, int64_t rows, int64_t first_slot, int64_t slot_step, const int64_t* ids,
                    const int64_t* positions, float* x, float* scratch) {
    const int64_t hidden = trunk->hidden, size = trunk->head_size, half = size / 2, length = trunk->cache_length;
    for (int64_t b = 0; b < rows; b++)
        std::memcpy(x + b * hidden, trunk->embedding + ids[b] * hidden, hidden * sizeof(float));
    float* scores = scratch;
    float* h = scores + realign_call_scratch(trunk);
    float* work = h + rows * hidden;
    for (int64_t i = 0; i < trunk->n_layers; i++) {
        const Layer& l = trunk->layers[i];
        const int64_t heads = l.queries + 2 * l.groups, outputs = heads * size, shared = l.queries / l.groups;
        float *qkv = work, *mixed = qkv + rows * outputs, *gate_up = mixed + rows * l.queries * size;
        for (int64_t b = 0; b < rows; b++)
            normalize(x + b * hidden, l.attention_norm, l.attention_floor, hidden, h + b * hidden);
        start_with(rows, l.qkv_bias, outputs, qkv);
        add_product(trunk->half, rows, h, hidden, l.qkv, outputs, hidden, outputs, qkv, outputs);
        for (int64_t b = 0; b < rows; b++) {
            float* q = qkv + b * outputs;
            const int64_t p = positions[b];
            const float* turn = trunk->turns + p * size;
            for (int64_t n = 0; n < l.queries + l.groups; n++) {
                float* y = q + n * size;
                if (l.qk_norm) normalize(y, l.qk_norm + n * size, l.qk_floor, size, y);
                for (int64_t d = 0; d < half; d++) {
                    const float even = y[2 * d], odd = y[2 * d + 1], cosine = turn[2 * d], sine = turn[2 * d + 1];
                    y[2 * d] = even * cosine - odd * sine;
                    y[2 * d + 1] = even * sine + odd * cosine;
                }
            }
            const int64_t from = l.window > 0 && p >= l.window ? p - l.window + 1 : 0;
            for (int64_t g = 0; g < l.groups; g++) {
                const int64_t row = ((first_slot + b * slot_step) * l.groups + g) * length;
                std::memcpy(l.keys + (row + p) * size, q + (l.queries + g) * size, size * sizeof(float));
                std::memcpy(l.values + (row + p) * size, q + (l.queries + l.groups + g) * size, size * sizeof(float));
                for (int64_t n = g * shared; n < (g + 1) * shared; n++)
                    attend(q + n * size, l.keys + (row + from) * size, l.values + (row + from) * size, size,
                           p + 1 - from, l.scaling, scores, mixed + (b * l.queries + n) * size);
            }
        }
        add_bias(rows, l.output_bias, hidden, x);
        add_product(trunk->half, rows, mixed, l.queries * size, l.output, hidden, l.queries * size, hidden, x, hidden);
        for (int64_t b = 0; b < rows; b++)
            normalize(x + b * hidden, l.mlp_norm, l.mlp_floor, hidden, h + b * hidden);
        start_with(rows, l.gate_up_bias, 2 * l.inner, gate_up);
        add_product(trunk->half, rows, h, hidden, l.gate_up, 2 * l.inner, hidden, 2 * l.inner, gate_up, 2 * l.inner);
        for (int64_t b = 0; b < rows; b++)
            activate(gate_up + b * 2 * l.inner, gate_up + b * 2 * l.inner + l.inner, l.inner);
        add_bias(rows, l.down_bias, hidden, x);
        add_product(trunk->half, rows, gate_up, 2 * l.inner, l.down, hidden, l.inner, hidden, x, hidden);
    }
    for (int64_t b = 0; b < rows; b++)
        normalize(x + b * hidden, trunk->norm, trunk->floor, hidden, x + b * hidden);
}

// c[rows, :columns] = a[rows, inputs] * w[inputs, :columns], where rows of c and w have `stride` columns. `w` is stored
// in bf16 if `half` is not 0.
void realign_product(int64_t rows, const float* a, const void* w, int64_t inputs, int64_t columns, float* c,
                     int64_t stride, int64_t half) {
    for (int64_t r = 0; r < rows; r++) std::memset(c + r * stride, 0, columns * sizeof(float));
    add_product(half, rows, a, inputs, w, stride, inputs, columns, c, stride);
}

// Log-probs of one token per row under the softmax of `logits` [rows, words], and the log-sum-exp of each row.
void realign_logprobs(int64_t rows, const float* logits, int64_t words, const int64_t* tokens, float* logprobs,
                      float* normalizers) {
    for (int64_t b = 0; b < rows; b++, logits += words) {
        float most = -INFINITY;
        for (int64_t i = 0; i < words; i++) most = logits[i] > most ? logits[i] : most;
        Vec totals = {};
        int64_t i = 0;
        for (; i + LANES <= words; i += LANES) totals += exponential(load(logits + i) - most);
        if (i < words) {
            Vec rest = spread(-INFINITY);
            std::memcpy(&rest, logits + i, (words - i) * sizeof(float));
            totals += exponential(rest - most);
        }
        const float size = std::log(sum(totals));
        logprobs[b] = logits[tokens[b]] - most - size;
        normalizers[b] = most + size;
    }
}

}  // extern "C"
