// Memory that grows with what is wanted of it and is kept from call to call.
#pragma once
#include <cstdlib>

struct Scratch {
    float* data = nullptr;
    size_t size = 0;
    float* of(size_t wanted) {
        if (wanted > size) {
            free(data);
            data = (float*)aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64);
            if (!data) abort();
            size = wanted;
        }
        return data;
    }
    ~Scratch() { free(data); }
};
