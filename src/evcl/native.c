// What a training step does to each number, in one pass over memory instead of one an operation.
// native.py compiles it where there is a compiler; evcl/nn/chain.py and evcl/training/rules/update.py do the same without it.

#include <math.h>
#include <stdint.h>
#include <string.h>

// e^x for |x| < 87, to two units in the last place; written out so that a compiler can vectorise it.
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;  // NaN stays NaN
    float k = rintf(x * 1.44269504f);
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// log x, to three units in the last place; NaN unless x is above 0 and finite.
static inline float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t k = (bits - 0x3f3504f3) >> 23;  // x = 2^k m with m between sqrt(1/2) and sqrt(2)
    bits -= k << 23;
    float m;
    memcpy(&m, &bits, 4);
    float r = m - 1.0f, z = r * r;
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    float found = p * r * z - 0.5f * z + r + (float)k * 0.69314718f;
    return x > 0.0f && x < INFINITY ? found : NAN;
}

// One step of Adam on means: g + a (w - c). `rate` and `root` hold the bias corrections.
void update_mean(float rate, float root, long n, float *restrict w, float *restrict first, float *restrict second,
                 const float *restrict grad, const float *restrict a, const float *restrict c) {
    for (long i = 0; i < n; i++) {
        float g = grad[i] + a[i] * (w[i] - c[i]);
        float m = 0.9f * first[i] + 0.1f * g, s = 0.999f * second[i] + 0.001f * g * g;
        first[i] = m;
        second[i] = s;
        w[i] -= rate * m / (sqrtf(s) * root + 1e-8f);
    }
}

// The same on log sigmas, g v + k (v - s) + d v (v - u), and the variance v = e^(2 w) that follows.
void update_log_std(float rate, float root, long n, float *restrict w, float *restrict first, float *restrict second,
                    const float *restrict grad, float *restrict variance, const float *restrict k,
                    const float *restrict c, const float *restrict d, const float *restrict u) {
    for (long i = 0; i < n; i++) {
        float v = variance[i];
        float g = grad[i] * v + k[i] * (v - c[i]) + d[i] * v * (v - u[i]);
        float m = 0.9f * first[i] + 0.1f * g, s = 0.999f * second[i] + 0.001f * g * g;
        first[i] = m;
        second[i] = s;
        float move = rate * m / (sqrtf(s) * root + 1e-8f);
        float next = w[i] - move;
        w[i] = next;
        variance[i] = move == 0.0f ? v : exponential(2.0f * next);  // one at rest stays where it is, to the last bit
    }
}

// The natural step on log sigmas, see update.py: `share` corrects the bias of the running mean of the curvature.
void update_natural(float rate, float share, long n, float *restrict w, float *restrict curvature,
                    const float *restrict grad, float *restrict variance, const float *restrict k,
                    const float *restrict s, const float *restrict d, const float *restrict u) {
    for (long i = 0; i < n; i++) {
        float v = variance[i], h = 0.999f * curvature[i] + 0.001f * grad[i];
        curvature[i] = h;
        h = h * share < 0.0f ? 0.0f : h * share;  // NaN stays NaN
        float stiff = k[i] + h + d[i] * (v - u[i]), least = 0.1f * k[i];
        stiff = stiff < least ? least : stiff;
        float move = 0.5f * rate * logarithm(k[i] / stiff * (s[i] / v));
        float next = w[i] + move;
        w[i] = next;
        variance[i] = move == 0.0f ? v : exponential(2.0f * next);
    }
}

// y = relu(m + t v) in place of m, its square, and t = eps / sqrt(v) in place of eps.
void activate(long n, float *restrict y, float *restrict square, float *restrict t, const float *restrict v) {
    for (long i = 0; i < n; i++) {
        float spread = v[i] < 1e-30f ? 1e-30f : v[i];
        float ratio = t[i] / sqrtf(spread);
        float out = y[i] + ratio * spread;
        out = out < 0.0f ? 0.0f : out;  // NaN stays NaN
        t[i] = ratio;
        y[i] = out;
        square[i] = out * out;
    }
}

// g = d + y e where y > 0, and h = g t.
void pass_on(long n, float *restrict g, float *restrict h, const float *restrict d, const float *restrict e,
             const float *restrict y, const float *restrict t) {
    for (long i = 0; i < n; i++) {
        float out = y[i] > 0.0f ? d[i] + y[i] * e[i] : 0.0f;
        g[i] = out;
        h[i] = out * t[i];
    }
}

// One row of logits an example: t = eps / sqrt(v) in place of eps, z = m + t v (z = m without v), the NLL of its label,
// and the gradients g of the mean over n examples and h = g t. Only the classes from `begin` to `end` take part.
static inline float row_loss(long classes, long begin, long end, long label, float n, const float *m, const float *v,
                             float *t, float *g, float *h) {
    float top = -INFINITY, total = 0.0f;
    for (long c = begin; c < end; c++) {
        float z = m[c];
        if (v) {
            float spread = v[c] < 1e-30f ? 1e-30f : v[c];
            t[c] /= sqrtf(spread);
            z += t[c] * spread;
        }
        g[c] = z;
        top = z > top ? z : top;
    }
    float nll = -g[label];
    for (long c = begin; c < end; c++) total += g[c] = exponential(g[c] - top);
    for (long c = 0; c < classes; c++) {
        float out = c < begin || c >= end ? 0.0f : (g[c] / total - (c == label)) / n;
        g[c] = out;
        if (v) h[c] = out * t[c];
    }
    return nll + top + logf(total);
}

// The mean NLL of n examples; `columns` may be null: then all classes take part; so may `weights`: all count the same.
void loss(long n, long classes, const int64_t *labels, const int64_t *columns, const float *weights, float *nll,
          const float *m, const float *v, float *t, float *g, float *h) {
    double sum = 0.0;
    for (long i = 0; i < n; i++) {
        long at = i * classes, begin = columns ? columns[2 * i] : 0, end = columns ? columns[2 * i + 1] : classes;
        float w = weights ? weights[i] : 1.0f;
        sum += w * row_loss(classes, begin, end, labels[i], n / w, m + at, v ? v + at : v, t + at, g + at, h + at);
    }
    *nll = (float)(sum / n);
}

// The rows of x that `rows` names, and their squares unless `square` is null.
void take(long n, long width, const int64_t *rows, const float *restrict x, float *restrict out,
          float *restrict square) {
    for (long i = 0; i < n; i++) {
        const float *from = x + rows[i] * width;
        for (long j = 0; j < width; j++) out[i * width + j] = from[j];
        if (square)
            for (long j = 0; j < width; j++) square[i * width + j] = from[j] * from[j];
    }
}
