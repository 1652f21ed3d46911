//! The parameter tensors of ResNet-50 (He et al., "Deep Residual Learning for Image Recognition",
//! 2015, table 1, the 50-layer column), in the order and by the names of its usual state
//! dictionary.

/// A parameter tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Name, such as `layer3.0.conv2.weight`.
    pub(super) name: String,
    /// Lengths of its dimensions, outermost first.
    pub(super) shape: Vec<usize>,
}

impl Tensor {
    /// Elements.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of its f32 elements.
    pub(super) fn bytes(&self) -> usize {
        self.len() * ELEMENT
    }
}

/// Bytes of an element.
pub(super) const ELEMENT: usize = size_of::<f32>();

/// The 161 parameter tensors.
pub(super) fn resnet50() -> Vec<Tensor> {
    let mut network = Network::default();
    network.convolution("conv1", 64, 3, 7);
    network.batch_norm("bn1", 64);
    let mut channels = 64;
    for (stage, (width, blocks)) in [(64, 3), (128, 4), (256, 6), (512, 3)].into_iter().enumerate() {
        for block in 0..blocks {
            let name = format!("layer{}.{block}", stage + 1);
            network.bottleneck(&name, channels, width, block == 0);
            channels = width * EXPANSION;
        }
    }
    network.push("fc.weight", &[CLASSES, channels]);
    network.push("fc.bias", &[CLASSES]);
    network.tensors
}

/// Output channels of a bottleneck block per channel of its 3 × 3 convolution.
const EXPANSION: usize = 4;
/// Classes of ImageNet-1k.
const CLASSES: usize = 1000;

#[derive(Default)]
struct Network {
    tensors: Vec<Tensor>,
}

impl Network {
    fn push(&mut self, name: &str, shape: &[usize]) {
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec() });
    }

    fn convolution(&mut self, name: &str, outputs: usize, inputs: usize, kernel: usize) {
        self.push(&format!("{name}.weight"), &[outputs, inputs, kernel, kernel]);
    }

    fn batch_norm(&mut self, name: &str, channels: usize) {
        self.push(&format!("{name}.weight"), &[channels]);
        self.push(&format!("{name}.bias"), &[channels]);
    }

    fn bottleneck(&mut self, name: &str, inputs: usize, width: usize, downsample: bool) {
        let outputs = width * EXPANSION;
        for (part, from, to, kernel) in [(1, inputs, width, 1), (2, width, width, 3), (3, width, outputs, 1)]
        {
            self.convolution(&format!("{name}.conv{part}"), to, from, kernel);
            self.batch_norm(&format!("{name}.bn{part}"), to);
        }
        if downsample {
            self.convolution(&format!("{name}.downsample.0"), outputs, inputs, 1);
            self.batch_norm(&format!("{name}.downsample.1"), outputs);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The published figures of the network: 161 tensors with 25,557,032 parameters.
    #[test]
    fn is_resnet50() {
        let tensors = resnet50();
        assert_eq!(tensors.len(), 161);
        assert_eq!(tensors.iter().map(Tensor::len).sum::<usize>(), 25_557_032);
        let shape = |name: &str| &tensors.iter().find(|t| t.name == name).unwrap().shape[..];
        assert_eq!(shape("conv1.weight"), [64, 3, 7, 7]);
        assert_eq!(shape("layer1.0.downsample.0.weight"), [256, 64, 1, 1]);
        assert_eq!(shape("layer3.5.conv2.weight"), [256, 256, 3, 3]);
        assert_eq!(shape("layer4.2.bn3.bias"), [2048]);
        assert_eq!(shape("fc.weight"), [1000, 2048]);
        let names: BTreeSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
        assert_eq!(names.len(), tensors.len());
    }
}
